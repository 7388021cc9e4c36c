"""Pictures of a program's flow graph: as a tree for the terminal, for Graphviz and Mermaid, as SVG and as HTML."""
