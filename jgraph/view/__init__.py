"""Pictures: scenes, layout, SVG and HTML. Pure."""
