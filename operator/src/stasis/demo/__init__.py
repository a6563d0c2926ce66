"""The demonstration: a gang suspended in mid-step and resumed elsewhere, proved undisturbed."""
