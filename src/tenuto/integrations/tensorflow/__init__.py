"""TensorFlow: variables by object graph, and a manager with the names of `tf.train.CheckpointManager`."""
