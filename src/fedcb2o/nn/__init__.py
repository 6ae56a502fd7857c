"""Networks: parameters as rows of one tensor, architectures and batch-norm statistics."""
