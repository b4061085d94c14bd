//! This file finds heavy matchings of words and cells in linear time, with at least half the greatest weight.
//!
//! The algorithm repeatedly takes an edge that is heavier than all edges at its ends (Robert Preis: *Linear Time
//! 1/2-Approximation Algorithm for Maximum Weighted Matching in General Graphs*. STACS 1999). If the edges have a
//! strict order, it finds one and the same matching in whatever order it meets them. Here proposals find it (Fredrik
//! Manne, Mahantesh Halappanavar: *New Effective Multithreaded Matching Algorithms*. IPDPS 2014): each word proposes to
//! its cells, heaviest edge first; each cell keeps the heaviest proposal; a word that is displaced goes on. Each edge
//! is proposed at most once.

/// The graph is bipartite, with words and cells as its nodes, and is stored in compressed rows.
#[derive(Debug)]
pub(super) struct Graph {
    /// The edges of word `w` are `starts[w]..starts[w + 1]`.
    starts: Vec<usize>,
    cells: Vec<u32>,
    weights: Vec<f64>,
}

/// The number that stands for the word of a free cell.
const FREE: u32 = u32::MAX;

impl Graph {
    /// Makes the graph from each word's cells and weights, heaviest first.
    pub(super) fn new(edges: &[Vec<(u32, f64)>]) -> Self {
        let mut graph = Graph { starts: vec![0], cells: Vec::new(), weights: Vec::new() };
        for edges in edges {
            debug_assert!(edges.is_sorted_by(|a, b| a.1 >= b.1));
            graph.cells.extend(edges.iter().map(|edge| edge.0));
            graph.weights.extend(edges.iter().map(|edge| edge.1));
            graph.starts.push(graph.cells.len());
        }
        graph
    }

    /// Returns the cell of each word in the matching of locally heaviest edges. Among equally heavy edges, an edge of a
    /// lower word comes first, then the earlier edge of a word.
    pub(super) fn matching(&self, cells: usize) -> Vec<Option<usize>> {
        let words = self.starts.len() - 1;
        // Each cell keeps the heaviest edge that is proposed to it, with the word of this edge.
        let mut kept = vec![(FREE, 0); cells];
        let mut next: Vec<usize> = self.starts[..words].to_vec();
        for first in 0..words {
            let mut word = first;
            while next[word] < self.starts[word + 1] {
                let edge = next[word];
                next[word] += 1;
                let (rival, rivals_edge) = kept[self.cells[edge] as usize];
                let order = match rival {
                    FREE => std::cmp::Ordering::Greater,
                    _ => self.weights[edge].total_cmp(&self.weights[rivals_edge]),
                };
                if order.then((rival as usize).cmp(&word)).is_gt() {
                    kept[self.cells[edge] as usize] = (word as u32, edge);
                    if rival == FREE {
                        break;
                    }
                    word = rival as usize;
                }
            }
        }
        let mut matched = vec![None; words];
        for (cell, (word, _)) in kept.into_iter().enumerate().filter(|(_, (word, _))| *word != FREE) {
            matched[word as usize] = Some(cell);
        }
        matched
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    type Edges = Vec<Vec<(u32, f64)>>;

    fn matching(edges: &[Vec<(u32, f64)>], cells: usize) -> Vec<Option<usize>> {
        Graph::new(edges).matching(cells)
    }

    fn weight(edges: &[Vec<(u32, f64)>], matched: &[Option<usize>]) -> f64 {
        let weight = |(word, cell): (usize, &Option<usize>)| {
            cell.map_or(0.0, |cell| edges[word].iter().find(|edge| edge.0 as usize == cell).expect("an edge").1)
        };
        matched.iter().enumerate().map(weight).sum()
    }

    /// Finds the greatest weight of a matching of the words from `word` on.
    fn greatest(edges: &[Vec<(u32, f64)>], word: usize, taken: &mut Vec<bool>) -> f64 {
        if word == edges.len() {
            return 0.0;
        }
        let mut best = greatest(edges, word + 1, taken);
        for &(cell, weight) in &edges[word] {
            if !std::mem::replace(&mut taken[cell as usize], true) {
                best = best.max(weight + greatest(edges, word + 1, taken));
                taken[cell as usize] = false;
            }
        }
        best
    }

    /// Takes all edges by falling weight whose ends are free.
    fn greedy(edges: &[Vec<(u32, f64)>], cells: usize) -> Vec<Option<usize>> {
        let place = |(word, edges): (usize, &Vec<(u32, f64)>)| {
            edges.iter().enumerate().map(|(place, edge)| (word, place, edge.0 as usize, edge.1)).collect::<Vec<_>>()
        };
        let mut all: Vec<(usize, usize, usize, f64)> = edges.iter().enumerate().flat_map(place).collect();
        all.sort_by(|a, b| b.3.total_cmp(&a.3).then((a.0, a.1).cmp(&(b.0, b.1))));
        let (mut matched, mut taken) = (vec![None; edges.len()], vec![false; cells]);
        for (word, _, cell, _) in all {
            if matched[word].is_none() && !taken[cell] {
                matched[word] = Some(cell);
                taken[cell] = true;
            }
        }
        matched
    }

    prop_compose! {
        /// Makes graphs of up to 7 words and 6 cells. They have few different weights, so that many are equal.
        fn graphs()(
            cells in 1usize..7,
            weights in prop::collection::vec(prop::collection::vec(0u8..12, 6), 0..8),
        ) -> (Edges, usize) {
            let edges = |weights: Vec<u8>| {
                let edges = (0..cells).filter(|cell| weights[*cell] < 9);
                let mut edges: Vec<_> = edges.map(|cell| (cell as u32, f64::from(weights[cell]))).collect();
                edges.sort_by(|a, b| b.1.total_cmp(&a.1));
                edges
            };
            (weights.into_iter().map(edges).collect(), cells)
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 1000, ..ProptestConfig::default() })]

        #[test]
        fn a_matching_has_at_least_half_the_greatest_weight((edges, cells) in graphs()) {
            let best = greatest(&edges, 0, &mut vec![false; cells]);
            prop_assert!(2.0 * weight(&edges, &matching(&edges, cells)) >= best);
        }

        #[test]
        fn a_matching_has_the_edges_that_are_locally_heaviest((edges, cells) in graphs()) {
            prop_assert_eq!(matching(&edges, cells), greedy(&edges, cells));
        }

        #[test]
        fn no_edge_has_both_ends_free((edges, cells) in graphs()) {
            let matched = matching(&edges, cells);
            for (word, edges) in edges.iter().enumerate().filter(|(word, _)| matched[*word].is_none()) {
                let is_free = |edge: &(u32, f64)| !matched.contains(&Some(edge.0 as usize));
                prop_assert!(!edges.iter().any(is_free), "word {} in {:?}", word, matched);
            }
        }
    }

    #[test]
    fn half_is_the_least() {
        // The middle edge of a path is barely the heaviest. Both others, together nearly twice as heavy, are lost.
        let edges = vec![vec![(1, 1.001), (0, 1.0)], vec![(1, 1.0)]];
        assert_eq!(matching(&edges, 2), [Some(1), None]);
    }

    #[test]
    fn a_long_chain_of_displacements_ends() {
        // Each word displaces the previous one.
        let words = 200_000u32;
        let edges: Edges = (0..words).map(|word| vec![(0, f64::from(word) + 1.0), (word + 1, 0.5)]).collect();
        let matched = Graph::new(&edges).matching(words as usize + 1);
        assert_eq!(matched[words as usize - 1], Some(0));
        assert!((0..words as usize - 1).all(|word| matched[word] == Some(word + 1)));
    }
}
