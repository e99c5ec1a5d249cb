"""What people open: HTML, JUnit, SARIF and summary, made from records alone."""
