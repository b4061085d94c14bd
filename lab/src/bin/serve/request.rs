//! Requests with different settings.

use crate::grammar::Grammar;
use lab::Result;
use mos_head::decode::{Constraints, Sampling, TokenRequest};

pub(crate) struct Request {
    pub(crate) number: usize,
    /// The first step in which the request may join.
    pub(crate) joins: u64,
    pub(crate) prompt: Vec<u32>,
    /// The number of token ids that are generated, unless the text ends before.
    pub(crate) tokens: usize,
    pub(crate) settings: TokenRequest,
    /// The grammar of the text, if it has one.
    grammar: Option<Grammar>,
}

impl Request {
    /// Lets the grammar allow the next id, in a vocabulary of this size.
    pub(crate) fn constrain(&mut self, vocab: usize) -> Result<()> {
        if let Some(grammar) = &self.grammar {
            let constraints = self.settings.constraints().clone();
            self.settings.set_constraints(constraints.with_allowed_mask(grammar.mask(vocab)))?;
        }
        Ok(())
    }

    /// Adds an id that was drawn.
    pub(crate) fn push(&mut self, id: u32) {
        self.settings.push(id);
        if let Some(grammar) = &mut self.grammar {
            grammar.push(id);
        }
    }

    /// Whether the text is done after this number of ids.
    pub(crate) fn is_done(&self, drawn: usize) -> bool {
        drawn >= self.tokens || self.settings.has_ended()
    }
}

/// The id that ends a text with a grammar.
const END: u32 = 0;

/// Returns five requests, in the order in which they join. The seed of each is its number, and the last has a grammar.
pub(crate) fn examples() -> Result<Vec<Request>> {
    let (new, none) = (Sampling::new, Constraints::new);
    let examples: [(u64, &[u32], usize, Sampling, Constraints); 5] = [
        (0, &[3, 5, 8], 12, Sampling::greedy(), none()),
        (0, &[1], 8, new().with_temperature(0.8).with_top_p(0.9), none().with_repetition_penalty(1.2)),
        (2, &[13, 21], 10, new().with_top_k(5), none().with_banned(&[0, 1]).with_frequency_penalty(0.5)),
        (4, &[34], 6, new().with_min_p(0.05), none().with_allowed(&[2, 4, 8, 16, 32]).with_bias(&[(8, 1.0)])),
        (5, &[21], 40, new(), none()),
    ];
    let last = examples.len() - 1;
    let request = |(number, (joins, prompt, tokens, sampling, constraints))| {
        let settings = TokenRequest::new(sampling, number as u64)?.with_constraints(constraints)?;
        let settings = settings.with_prompt(prompt).with_best(3).with_entropy(true);
        let (grammar, ends) = if number == last { (Some(Grammar::new(END)), &[END][..]) } else { (None, &[][..]) };
        let settings = settings.with_ends(ends);
        Ok(Request { number, joins, prompt: prompt.to_vec(), tokens, settings, grammar })
    };
    examples.into_iter().enumerate().map(request).collect()
}
