"""How good a checkpoint is, measured with the model alone: no engine is needed."""
