"""What a person looks at after a run: figures, one page that opens offline, a model card."""
