"""What is special to vLLM 0.33.0."""
