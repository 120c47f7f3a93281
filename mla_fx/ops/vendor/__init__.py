"""The vendor's operators that the compiler never emits: for code that calls them itself."""
