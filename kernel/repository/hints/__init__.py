"""Sentences that help after a mistake, beside Triton's texts."""
