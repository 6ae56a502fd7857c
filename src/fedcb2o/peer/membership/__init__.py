"""Membership of a federation: identities, certificates, and the federation file."""
