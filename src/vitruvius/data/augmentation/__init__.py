"""How training images are varied: batches in memory by each image's key, or one image in a worker process."""
