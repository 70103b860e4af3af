"""What attention, decoding and row transforms share in Triton's language."""
