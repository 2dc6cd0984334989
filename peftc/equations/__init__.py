"""Forms that are equations in a text: what follows from the text, and the code that it becomes."""
