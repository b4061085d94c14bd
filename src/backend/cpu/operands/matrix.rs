//! Views of matrices in memory, for reading and for writing.

use std::marker::PhantomData;
use std::ops::Range;

/// A matrix for reading: `rows x cols` elements at `data[row * row_stride + col * col_stride]`.
#[derive(Clone, Copy)]
pub(crate) struct View<'a, F> {
    pub(crate) data: *const F,
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    pub(crate) row_stride: isize,
    pub(crate) col_stride: isize,
    lifetime: PhantomData<&'a [F]>,
}

/// A matrix for writing, with contiguous rows.
pub(crate) struct ViewMut<'a, F> {
    pub(crate) data: *mut F,
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    pub(crate) row_stride: isize,
    lifetime: PhantomData<&'a mut [F]>,
}

// SAFETY: a `View` is a shared borrow of its elements, like `&[F]`, and `F` is `Sync`.
unsafe impl<F: Sync> Send for View<'_, F> {}
// SAFETY: as above.
unsafe impl<F: Sync> Sync for View<'_, F> {}
// SAFETY: a `ViewMut` is a unique borrow of its elements, like `&mut [F]`, and `F` is `Send`.
unsafe impl<F: Send> Send for ViewMut<'_, F> {}

impl<'a, F> View<'a, F> {
    /// Views a row-major slice, whose rows start `stride` elements apart, as a `rows x cols` matrix.
    pub(crate) fn new(data: &'a [F], rows: usize, cols: usize, stride: usize) -> Self {
        assert!(rows == 0 || (cols <= stride && (rows - 1) * stride + cols <= data.len()));
        View { data: data.as_ptr(), rows, cols, row_stride: stride as isize, col_stride: 1, lifetime: PhantomData }
    }

    /// Returns some of the columns.
    pub(crate) fn columns(self, columns: Range<usize>) -> Self {
        assert!(columns.start <= columns.end && columns.end <= self.cols);
        View { data: self.data.wrapping_offset(columns.start as isize * self.col_stride), cols: columns.len(), ..self }
    }

    /// Returns the transpose, which is the same elements with other strides.
    pub(crate) fn transposed(self) -> Self {
        View { rows: self.cols, cols: self.rows, row_stride: self.col_stride, col_stride: self.row_stride, ..self }
    }
}

impl<'a, F> ViewMut<'a, F> {
    /// As [`View::new`], for writing.
    pub(crate) fn new(data: &'a mut [F], rows: usize, cols: usize, stride: usize) -> Self {
        assert!(rows == 0 || (cols <= stride && (rows - 1) * stride + cols <= data.len()));
        ViewMut { data: data.as_mut_ptr(), rows, cols, row_stride: stride as isize, lifetime: PhantomData }
    }

    /// Borrows a row.
    pub(crate) fn row_mut(&mut self, row: usize) -> &mut [F] {
        assert!(row < self.rows);
        // SAFETY: the row lies in the matrix, which is a unique borrow, and its elements are contiguous.
        unsafe { std::slice::from_raw_parts_mut(self.data.offset(row as isize * self.row_stride), self.cols) }
    }

    /// Borrows some of the columns.
    pub(crate) fn columns(&mut self, columns: Range<usize>) -> ViewMut<'_, F> {
        assert!(columns.start <= columns.end && columns.end <= self.cols);
        let data = self.data.wrapping_add(columns.start);
        ViewMut { data, rows: self.rows, cols: columns.len(), row_stride: self.row_stride, lifetime: PhantomData }
    }

    /// Splits the matrix into tiles of at most `rows x cols`, each with its ranges of rows and columns.
    pub(crate) fn tiles(self, rows: usize, cols: usize) -> Vec<(Range<usize>, Range<usize>, ViewMut<'a, F>)> {
        let mut tiles = Vec::new();
        for r in (0..self.rows).step_by(rows) {
            for c in (0..self.cols).step_by(cols) {
                let row_range = r..self.rows.min(r + rows);
                let col_range = c..self.cols.min(c + cols);
                let tile = ViewMut {
                    // SAFETY: r < self.rows and c < self.cols, so this is an element of the matrix.
                    data: unsafe { self.data.offset(r as isize * self.row_stride + c as isize) },
                    rows: row_range.len(),
                    cols: col_range.len(),
                    row_stride: self.row_stride,
                    // The borrow is unique: `self` is consumed, and the tiles are disjoint.
                    lifetime: PhantomData,
                };
                tiles.push((row_range, col_range, tile));
            }
        }
        tiles
    }
}
