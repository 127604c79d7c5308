"""The demo of lent memory: an image service lends it to a Llama, and takes it back."""
