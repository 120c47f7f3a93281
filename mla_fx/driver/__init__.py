"""One compilation from Dynamo's graph to a callable, with what is found, kept and told."""
