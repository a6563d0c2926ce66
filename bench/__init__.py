"""The data path measured side by side with what people would use instead. `python -m bench.run --help`."""
