"""The decoding core: drafters propose, verifiers decide, the loop commits."""
