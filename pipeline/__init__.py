"""From a trained model to a verified engine bundle, and the command line."""
