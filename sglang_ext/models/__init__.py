"""Model classes by SGLang's convention: each module names its class in ``EntryClass``."""
