//! Codes of words: each word is a row and a column of a table.

mod assignment;
