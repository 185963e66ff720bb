"""Gradients of single samples, without ever holding them."""
