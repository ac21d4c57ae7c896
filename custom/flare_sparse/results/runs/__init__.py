"""Result folder of a run: writing the record, reading it back, loading, decrypting and exporting the model."""
