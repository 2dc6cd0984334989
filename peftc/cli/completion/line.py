"""The words of a line that is being written."""


def words_of(line: str) -> list[str]:
    """The words up to the cursor, without quotes. The last is the current one, which may be empty.

    A quote need not be closed yet. Variables and commands in the line stay as they are.
    """
    words, current, quote, escaped = list[str](), "", "", False
    for char in line:
        if escaped:
            current, escaped = current + char, False
        elif char == "\\" and quote != "'":
            escaped = True
        elif quote:
            quote, current = ("", current) if char == quote else (quote, current + char)
        elif char in "'\"":
            quote = char
        elif char.isspace():
            if current:
                words.append(current)
            current = ""
        else:
            current += char
    return [*words, current]
