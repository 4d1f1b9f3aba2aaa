"""Whether engines and transformers compute what the trainer does."""
