//! Large working arrays that a thread keeps for its next task.
//!
//! A task of the solver works on arrays of tens of megabytes; having them from the system anew each time costs a page fault
//! for every 4 KiB, a tenth of the solver's time. A thread that ends gives its arrays back to the system.

use std::cell::RefCell;

use crate::real::Real;

/// Arrays that a thread keeps at most.
const KEPT: usize = 4;

/// The arrays of a thread, for one element type.
pub(crate) type Shelf<T> = RefCell<Vec<Vec<T>>>;

/// An array of `len` elements of unspecified value.
pub(crate) fn take<T: Real>(len: usize) -> Vec<T> {
    T::with_shelf(|shelf| {
        let mut arrays = shelf.borrow_mut();
        // The smallest that is large enough, otherwise none: growing one would copy it.
        let fit = (0..arrays.len()).filter(|&i| arrays[i].capacity() >= len).min_by_key(|&i| arrays[i].capacity());
        let mut array = fit.map_or_else(Vec::new, |i| arrays.swap_remove(i));
        array.resize(len, T::ZERO);
        array
    })
}

/// Puts an array back.
pub(crate) fn give<T: Real>(array: Vec<T>) {
    T::with_shelf(|shelf| {
        let mut arrays = shelf.borrow_mut();
        arrays.push(array);
        if arrays.len() > KEPT {
            let smallest = (0..arrays.len()).min_by_key(|&i| arrays[i].capacity());
            drop(smallest.map(|i| arrays.swap_remove(i)));
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_array_comes_back() {
        let mut array = take::<f32>(1000);
        array[999] = 5.0;
        let place = array.as_ptr();
        give(array);
        let again = take::<f32>(800);
        assert_eq!((again.len(), again.as_ptr()), (800, place));
        assert_eq!(take::<f32>(10).len(), 10);
    }
}
