"""The compressed exchange of gradients: what is sent, and the sum of what arrives."""
