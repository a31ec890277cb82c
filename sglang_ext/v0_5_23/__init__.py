"""What is particular to SGLang 0.5.23."""
