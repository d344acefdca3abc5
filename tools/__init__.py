"""Tools that build or check the product; none of them is part of the wheel."""
