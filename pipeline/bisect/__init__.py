"""Finding what makes two models differ: `kiln bisect`."""
