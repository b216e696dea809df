"""DeepSeek-V4 attention over pages and slots: projections, the layer, and the backend that SGLang calls."""
