# SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause
"""The document that says which test shows which demand of the RFCs."""

import conformance


def test_marks():
    assert conformance.marks("B19, R4391-9.1.2.a: x") == ["R4391-9.1.2.a"]
    assert conformance.marks("R4391-4.a, -4.b, -10.g; R8064-3.") == ["R4391-4.a", "R4391-4.b", "R4391-10.g", "R8064-3"]
    assert conformance.marks("R4391, xR4391-5.a-1") == []


def test_python_tests():
    text = 'def test_one():\n    """R4391-2: x"""\n\ndef helper():\n    """R4391-5.a"""\n\ndef test_two(a):\n    pass\n'
    assert list(conformance.python_tests(text)) == [("test_one", ["R4391-2"]), ("test_two", [])]


def test_kunit_tests():
    text = """
fn code() {} // R4391-2

mod tests {
    /// R4391-5.a
    #[test]
    fn first() {
        // R4391-4.a, -4.b
    }

    #[test]
    fn second() {}
}
"""
    assert list(conformance.kunit_tests(text)) == [("first", ["R4391-5.a", "R4391-4.a", "R4391-4.b"]), ("second", [])]


def test_names_that_are_none():
    assert conformance.unknown(["R4391-5.a", "R4391-4.c", "R4391-99", "R4755-2", "R4392-9"]) == ["R4391-99", "R4392-9"]


def test_the_document_is_up_to_date():
    assert conformance.complaints() == []


def test_rows_are_said_once():
    rows = [row for row, *_ in conformance.ROWS]
    assert len(set(rows)) == len(rows) and not set(rows) & set(conformance.FACTS)
    assert set(conformance.NOTES) <= set(rows)
