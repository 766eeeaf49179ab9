"""specnb on a tiny random model of every family of transformers, against transformers' own plain decoding."""
