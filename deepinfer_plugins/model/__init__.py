"""DeepSeek-V4.1-Flash, written once and knowing no engine."""
