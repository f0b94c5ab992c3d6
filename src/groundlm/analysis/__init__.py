"""A look inside a trained model: what its state holds, and what each part of it is worth."""
