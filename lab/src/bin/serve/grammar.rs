//! A small grammar, as an automaton over token ids: a list of one-digit numbers, `[ n , n .. ]`, and then the end.

use std::sync::Arc;

/// The ids of the grammar's terminals.
const OPEN: u32 = 40;
const COMMA: u32 = 41;
const CLOSE: u32 = 42;
const DIGITS: std::ops::Range<u32> = 10..20;

#[derive(Clone, Copy)]
enum State {
    Start,
    Number,
    AfterNumber,
    Closed,
}

/// The grammar, and how far a text has come in it.
pub(crate) struct Grammar {
    state: State,
    end: u32,
}

impl Grammar {
    pub(crate) fn new(end: u32) -> Self {
        Grammar { state: State::Start, end }
    }

    /// Returns the ids that may come next, as a mask: that of id i is bit `i % 32` of word `i / 32`.
    pub(crate) fn mask(&self, vocab: usize) -> Arc<[u32]> {
        let mut words = vec![0u32; vocab.div_ceil(32)];
        let ids = match self.state {
            State::Start => vec![OPEN],
            State::Number => DIGITS.collect(),
            State::AfterNumber => vec![COMMA, CLOSE],
            State::Closed => vec![self.end],
        };
        ids.into_iter().for_each(|id| words[id as usize / 32] |= 1 << (id % 32));
        words.into()
    }

    /// Moves on by an id that the mask allowed.
    pub(crate) fn push(&mut self, id: u32) {
        self.state = match id {
            OPEN | COMMA => State::Number,
            CLOSE => State::Closed,
            _ => State::AfterNumber,
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn allowed(grammar: &Grammar) -> Vec<u32> {
        let words = grammar.mask(100);
        (0..100).filter(|id| words[*id as usize / 32] >> (id % 32) & 1 == 1).collect()
    }

    #[test]
    fn a_list_is_a_text_of_the_grammar() {
        let mut grammar = Grammar::new(0);
        for (id, next) in [(OPEN, (10..20).collect()), (13, vec![41, 42]), (COMMA, (10..20).collect())] {
            assert!(allowed(&grammar).contains(&id));
            grammar.push(id);
            assert_eq!(allowed(&grammar), next);
        }
        [12, CLOSE].into_iter().for_each(|id| grammar.push(id));
        assert_eq!(allowed(&grammar), [0]);
    }
}
