"""What DeepInfer does around the model: sampling, verification, scheduling, replay. Knows no engine."""
