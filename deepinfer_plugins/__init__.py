"""Makes unmodified vLLM and SGLang run DeepSeek-V4.1-Flash, with the same tokens from both."""

__version__ = "0.1.0"
