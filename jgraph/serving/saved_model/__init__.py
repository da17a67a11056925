"""SavedModel of TensorFlow, made of an exported model: its code and its arrays."""
