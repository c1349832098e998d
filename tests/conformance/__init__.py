"""torch's own suite of distributed tests, on gloo and on this package's backend."""
