//! Verifies drafted token ids by agreement: a draft is accepted if it is the id that its request draws there.
//!
//! The noise of a request is a function of its seed, the step and the token id ([`TokenRequest`]), so that the ids of
//! the next steps can be drawn at once, from the hidden states after each of the drafts. They are those of plain
//! sampling as long as they agree with the drafts, and so is the first that does not.

use super::next_token::{NextToken, TokenRequest};
use crate::error::{Error, Result};
use crate::tensors::checks::check_ids;

/// The token ids of a text that [`OutputLayer::verify`](crate::OutputLayer::verify) has drawn: the accepted drafts, and
/// one more.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Verified {
    /// The next tokens of the text: the `accepted` drafts, and the token after them, unless the last of the drafts ends
    /// the text ([`TokenRequest::with_ends`]).
    pub tokens: Vec<NextToken>,
    /// The number of drafts that were accepted.
    pub accepted: usize,
}

/// The drafts of some texts, with a request for each row of hidden states.
pub(crate) struct Verification<'a> {
    texts: Vec<DraftedText<'a>>,
    /// The request of each row: that of its text after the drafts before the row.
    requests: Vec<TokenRequest>,
}

/// The drafts of a text.
struct DraftedText<'a> {
    drafts: &'a [u32],
    /// The first row of the text.
    first: usize,
    /// The number of rows that are computed: one more than there are drafts, unless a row has an error.
    rows: usize,
    /// The error of the first row that is not computed. It counts only if all drafts before it are accepted.
    error: Option<Error>,
}

impl<'a> Verification<'a> {
    /// Checks drafts and requests, and that there are as many hidden states as drafts and texts.
    pub(crate) fn new(
        positions: usize,
        vocab: usize,
        drafts: &[&'a [u32]],
        requests: &[&mut TokenRequest],
    ) -> Result<Self> {
        if drafts.len() != requests.len() {
            return Err(Error::config(
                "drafts",
                format!("a list for each of {} requests", requests.len()),
                drafts.len(),
            ));
        }
        let rows = drafts.iter().map(|drafts| drafts.len() + 1).sum();
        if positions != rows {
            return Err(Error::config(
                "hidden",
                format!("{rows} positions: one more than drafts for each text"),
                positions,
            ));
        }
        for (index, (drafts, request)) in drafts.iter().zip(requests).enumerate() {
            let named = |error| Error::Request { index, error: Box::new(error) };
            request.check(vocab).map_err(named)?;
            check_ids("drafts", *drafts, vocab).map_err(named)?;
        }
        let mut texts = Vec::with_capacity(drafts.len());
        let mut row_requests = Vec::with_capacity(rows);
        for (drafts, request) in drafts.iter().zip(requests) {
            texts.push(DraftedText { drafts, first: row_requests.len(), rows: drafts.len() + 1, error: None });
            let mut request = (*request).clone();
            for &draft in *drafts {
                row_requests.push(request.clone());
                request.push(draft);
            }
            row_requests.push(request);
        }
        Ok(Verification { texts, requests: row_requests })
    }

    /// Verifies the drafts of each text by the tokens that `next_tokens` draws for all rows, or for some of them.
    ///
    /// An error of a row after a rejected draft, or after the end of the text, does not count, because plain sampling
    /// never reaches that row: the rows before it are computed again without it.
    pub(crate) fn verify(
        mut self,
        next_tokens: impl Fn(Option<&[u32]>, &[&TokenRequest]) -> Result<Vec<NextToken>>,
    ) -> Result<Vec<Verified>> {
        loop {
            let rows: Vec<u32> =
                self.texts.iter().flat_map(|text| text.first..text.first + text.rows).map(|row| row as u32).collect();
            let requests: Vec<_> = rows.iter().map(|&row| &self.requests[row as usize]).collect();
            let are_all = rows.len() == self.requests.len();
            let drawn = next_tokens((!are_all).then_some(&rows[..]), &requests);
            match drawn.map_err(|error| error.with_position_from(&rows)) {
                Ok(tokens) => return self.accept(tokens),
                Err(error) => self.leave_out(error)?,
            }
        }
    }

    /// Leaves out the row that an error names, and those after it. Returns the error if there is no such row, or if it
    /// is the first of its text.
    fn leave_out(&mut self, error: Error) -> Result<()> {
        let row = error.position();
        let text = row.and_then(|row| self.texts.iter_mut().rev().find(|text| text.first <= row));
        match (row, text) {
            (Some(row), Some(text)) if row > text.first => {
                (text.rows, text.error) = (row - text.first, Some(error));
                Ok(())
            }
            _ => Err(error),
        }
    }

    /// Returns the tokens of each text as far as they agree with its drafts, and the first that does not.
    fn accept(self, tokens: Vec<NextToken>) -> Result<Vec<Verified>> {
        let mut tokens = tokens.into_iter();
        let mut verified = Vec::with_capacity(self.texts.len());
        for DraftedText { drafts, first, rows, error } in self.texts {
            let mut tokens: Vec<NextToken> = tokens.by_ref().take(rows).collect();
            let accepted = tokens.iter().zip(drafts).take_while(|(token, draft)| token.token_id == **draft).count();
            let request = &self.requests[first];
            if let Some(last) = tokens[..accepted].iter().position(|token| request.ends_at(token.token_id)) {
                tokens.truncate(last + 1);
                verified.push(Verified { accepted: tokens.len(), tokens });
                continue;
            }
            if let Some(error) = error.filter(|_| accepted == rows) {
                return Err(error);
            }
            tokens.truncate(accepted + 1);
            verified.push(Verified { tokens, accepted });
        }
        Ok(verified)
    }
}
