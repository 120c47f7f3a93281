"""Reports, dumps and verification."""
