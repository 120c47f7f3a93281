"""One compilation, from Dynamo's graph to a callable: options, discovery, caching, reports and the fence."""
