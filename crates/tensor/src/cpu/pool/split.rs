//! Outputs that fall into disjoint pieces, one a task.

#![allow(unsafe_code, reason = "several threads write disjoint parts of one slice")]

use std::marker::PhantomData;

/// Something that falls into disjoint pieces: [`Chunks`], [`Panels`], or a tuple of such.
///
/// # Safety
/// Pieces of different tasks must not overlap.
pub unsafe trait Split: Sync {
    /// Exclusive access to one piece.
    type Piece;

    /// Number of pieces.
    fn pieces(&self) -> usize;

    /// Piece `task`.
    ///
    /// # Safety
    /// Each `task < pieces()` may be asked for once.
    unsafe fn piece(&self, task: usize) -> Self::Piece;
}

/// A slice cut into consecutive chunks of `len` elements (the last may be shorter).
#[derive(Debug)]
pub struct Chunks<'a, T> {
    start: *mut T,
    total: usize,
    len: usize,
    slice: PhantomData<&'a mut [T]>,
}

// SAFETY: only `Split::piece` reaches the elements, each from one thread; `T: Send` lets them go there.
unsafe impl<T: Send> Sync for Chunks<'_, T> {}

impl<'a, T> Chunks<'a, T> {
    /// Chunks of `len` elements (0 counts as 1).
    pub fn new(slice: &'a mut [T], len: usize) -> Self {
        Self { start: slice.as_mut_ptr(), total: slice.len(), len: len.max(1), slice: PhantomData }
    }
}

// SAFETY: chunk `i` is `i * len .. (i + 1) * len`, cut at the end of the slice.
unsafe impl<'a, T: Send> Split for Chunks<'a, T> {
    type Piece = &'a mut [T];

    fn pieces(&self) -> usize {
        self.total.div_ceil(self.len)
    }

    unsafe fn piece(&self, task: usize) -> &'a mut [T] {
        assert!(task < self.pieces(), "the piece exists");
        let first = task * self.len;
        // SAFETY: in bounds of the slice borrowed for 'a; disjoint from every other chunk.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(first), self.len.min(self.total - first)) }
    }
}

/// Columns `start .. start + width` of `rows` rows of a row-major slice, cut into panels of `len` columns.
#[derive(Debug)]
pub struct Panels<'a> {
    origin: *mut f32,
    rows: usize,
    stride: usize,
    width: usize,
    len: usize,
    slice: PhantomData<&'a mut [f32]>,
}

// SAFETY: only `Split::piece` reaches the elements, each from one thread.
unsafe impl Sync for Panels<'_> {}

impl<'a> Panels<'a> {
    /// Panels of `len` columns (0 counts as 1) of a slice `[rows, stride]`.
    ///
    /// # Panics
    /// When the columns do not lie in the stride or the rows not in the slice.
    pub fn new(slice: &'a mut [f32], rows: usize, stride: usize, start: usize, width: usize, len: usize) -> Self {
        assert!(start.checked_add(width).is_some_and(|end| end <= stride), "the columns lie in the row");
        assert!(rows.checked_mul(stride).is_some_and(|end| end <= slice.len()), "the rows lie in the slice");
        let origin = slice.as_mut_ptr().wrapping_add(start);
        Self { origin, rows, stride, width, len: len.max(1), slice: PhantomData }
    }
}

// SAFETY: panel `i` is the columns `start + i * len ..`, at most `len` and at most to the end of the range.
unsafe impl<'a> Split for Panels<'a> {
    type Piece = Panel<'a>;

    fn pieces(&self) -> usize {
        self.width.div_ceil(self.len)
    }

    unsafe fn piece(&self, task: usize) -> Panel<'a> {
        assert!(task < self.pieces(), "the piece exists");
        let start = task * self.len;
        Panel {
            origin: self.origin.wrapping_add(start),
            rows: self.rows,
            stride: self.stride,
            start,
            width: self.len.min(self.width - start),
            slice: PhantomData,
        }
    }
}

/// Some columns of all rows.
#[derive(Debug)]
pub struct Panel<'a> {
    origin: *mut f32,
    rows: usize,
    stride: usize,
    start: usize,
    width: usize,
    slice: PhantomData<&'a mut [f32]>,
}

impl Panel<'_> {
    /// First column, counted from the start of the columns that were split.
    pub fn start(&self) -> usize {
        self.start
    }

    /// Number of columns.
    pub fn width(&self) -> usize {
        self.width
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// The panel's columns of row `i`.
    ///
    /// # Panics
    /// When the row does not exist.
    #[inline]
    pub fn row_mut(&mut self, i: usize) -> &mut [f32] {
        assert!(i < self.rows, "the row exists");
        // SAFETY: `Panels::new` checked that the columns of all rows lie in the slice; panels are disjoint; the borrow of
        // `self` keeps this panel's rows from being handed out twice at a time.
        unsafe { std::slice::from_raw_parts_mut(self.origin.add(i * self.stride), self.width) }
    }
}

macro_rules! split_tuple {
    ($($name:ident $index:tt),*) => {
        // SAFETY: the pieces of each part are disjoint.
        unsafe impl<$($name: Split),*> Split for ($($name,)*) {
            type Piece = ($($name::Piece,)*);

            fn pieces(&self) -> usize {
                let pieces = self.0.pieces();
                $(assert_eq!(self.$index.pieces(), pieces, "the parts have equally many pieces");)*
                pieces
            }

            unsafe fn piece(&self, task: usize) -> Self::Piece {
                // SAFETY: passed on to the caller.
                unsafe { ($(self.$index.piece(task),)*) }
            }
        }
    };
}
split_tuple!(A 0, B 1);
split_tuple!(A 0, B 1, C 2);
split_tuple!(A 0, B 1, C 2, D 3);
