"""A differential fuzzer: random calls of specnb against transformers' plain decoding; `python tests/fuzz.py`."""
