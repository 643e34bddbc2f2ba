"""GGUF files, as llama.cpp writes them: what their headers say, as the files of a model folder."""
