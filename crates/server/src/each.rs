//! A value for each answer of a request.

use std::ops::{Index, IndexMut};

/// A value for each answer. Nearly all requests have one answer, whose value lies in place: memory of its own would be fetched
/// for every token.
#[derive(Debug)]
pub(crate) struct Each<T> {
    first: Option<T>,
    others: Vec<T>,
}

impl<T> Each<T> {
    /// The values in the order of the answers.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &T> {
        self.first.iter().chain(&self.others)
    }
}

impl<T> FromIterator<T> for Each<T> {
    fn from_iter<I: IntoIterator<Item = T>>(values: I) -> Self {
        let mut values = values.into_iter();
        Self { first: values.next(), others: values.collect() }
    }
}

impl<T> Index<usize> for Each<T> {
    type Output = T;

    fn index(&self, answer: usize) -> &T {
        match (answer, &self.first) {
            (0, Some(first)) => first,
            _ => &self.others[answer.wrapping_sub(1)],
        }
    }
}

impl<T> IndexMut<usize> for Each<T> {
    fn index_mut(&mut self, answer: usize) -> &mut T {
        match (answer, &mut self.first) {
            (0, Some(first)) => first,
            _ => &mut self.others[answer.wrapping_sub(1)],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_keep_their_order() {
        for count in 0..4usize {
            let mut each: Each<usize> = (0..count).collect();
            assert!(each.iter().copied().eq(0..count));
            (0..count).for_each(|answer| each[answer] += 10);
            assert!((0..count).all(|answer| each[answer] == answer + 10));
        }
    }

    #[test]
    #[should_panic(expected = "out of bounds")]
    fn there_is_no_value_behind_the_last() {
        let each: Each<u8> = [1].into_iter().collect();
        let _none = each[1];
    }
}
