"""DeepSeek-V4 serving for SGLang: compressed entries in radix-shared pages, state in per-request slots."""

__version__ = "0.1.0"
