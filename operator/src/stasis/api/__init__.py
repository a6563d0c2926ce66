"""The Kubernetes API of Stasis: names, types, and the CustomResourceDefinitions made from them."""
