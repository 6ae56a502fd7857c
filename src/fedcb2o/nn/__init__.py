"""Networks: parameters as rows of one tensor, architectures and batch-norm statistics.

Example:
    >>> from fedcb2o.nn import architectures, parameters
    >>> parameters.dimension(architectures.logistic([1, 8, 8], 10))
    650
"""
