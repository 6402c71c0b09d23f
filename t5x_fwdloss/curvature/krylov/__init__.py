"""Krylov spaces: orthonormal bases, Lanczos, eigenpairs."""
