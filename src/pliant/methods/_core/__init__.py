"""The shell that all methods share: attaching, the five kinds, fresh draws, surgery."""
